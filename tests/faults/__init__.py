"""What the checkpoint system promises when processes die, disks fill up and files are damaged."""
