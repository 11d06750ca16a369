"""The families, a module each: which layers a pipeline of diffusers has, and how a sample runs through them."""
