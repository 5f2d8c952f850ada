"""State components: optimizer state by FQN, RNG state, schemas and tensor checks of what a checkpoint holds."""
