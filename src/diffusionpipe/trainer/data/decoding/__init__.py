"""Files of pictures and clips to tensors of levels."""
