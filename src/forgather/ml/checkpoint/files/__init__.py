"""Files of a checkpoint: planned, hashed while they are written, fsynced, verified when they are read."""
