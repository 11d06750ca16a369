"""Layers of parts that several families share: autoencoders and text encoders."""
