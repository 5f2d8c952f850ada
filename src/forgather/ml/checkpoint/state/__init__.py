"""State components: optimizer state by FQN, RNG state, and validation of loaded values by schemas and tensor checks.

Built-in components check a loaded state completely before they apply any of it.
"""
