"""The PyTorch reference: the same network, target and loop; imports no MLX."""
