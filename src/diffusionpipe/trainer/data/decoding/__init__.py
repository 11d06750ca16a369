"""Decodes files of pictures and clips to tensors of levels, 0 to 255."""
