"""What the commands are built from; nothing in here is run by hand."""
