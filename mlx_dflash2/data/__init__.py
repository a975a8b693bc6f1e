"""Text and token rows to train on; imports no backend at module level."""
