"""What the scripts share. Nothing here is run by itself."""
