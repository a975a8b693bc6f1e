"""Training of a drafter against a frozen target."""
