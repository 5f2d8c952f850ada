"""Background saves: staging memory, staged snapshots, deferred replica comparison, and the thread that writes them.

`BackgroundSaves` in `saves` is the entry point. `CheckpointManager` owns one if `async_save=True`.
"""
