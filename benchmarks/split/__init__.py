"""What splitting the backward costs."""
