"""Engines of the drop-in: Forgather's trainers with hooks that call the methods of a `forgather.hf.Trainer`.

`strategies` has one engine class per strategy, and `hooks` the methods that they share.
"""
