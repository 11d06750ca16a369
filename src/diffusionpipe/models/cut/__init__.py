"""Cutting a module of any class into layers: its export, its leaves, and the code between them."""
