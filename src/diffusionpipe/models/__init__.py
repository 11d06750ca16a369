"""diffusers and transformers models as layer graphs."""
