"""The sizes and patches at which pictures are trained, and the order of samples of several sizes."""
