"""The work of one action: stages, their backward, casts, frozen layers and the rows that they leave."""
