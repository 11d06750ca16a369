"""Two backbones over the same devices: which way to run them is fastest."""
