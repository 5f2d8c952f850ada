"""Resumable data loaders: batches of one epoch at a time, from a position that is saved in checkpoints.

`builders` chooses the loader of a process. `ranks.parallel_loading` and `ranks.team` wrap it if there are several ranks.
"""

# Loaders, from the outermost to the innermost. In a single process the outer two are absent.
#
#     SynchronizedDataLoader              Several ranks: one all-reduce per batch (ends, errors, targets, stop signals).
#       DataloaderDispatcher              One rank reads for others: sends each batch to its rank.
#         OrderedLoader                   Map-style dataset: batches of a seeded order (data_order).
#         StreamLoader                    Iterable dataset: stream_batches, with the state of the dataset.
#         StatefulLoader, CountingLoader  DataLoader of the user: its own state, or the number of batches.
#           torch DataLoader -> ExplainingCollator (data_errors) -> collation -> dataset.
