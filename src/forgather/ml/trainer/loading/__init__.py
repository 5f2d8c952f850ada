"""Loaders: batches of one epoch at a time, from a position that is checkpointed. Who wraps whom:

    SynchronizedDataLoader              several ranks: one all-reduce per batch (ends, errors, targets, stop requests)
      DataloaderDispatcher              only if one rank reads for others: sends each batch to its rank
        OrderedLoader                   map-style dataset: batches of a seeded order (data_order), by workers or not
        StreamLoader                    iterable dataset: stream_batches, with the dataset's own state
        StatefulLoader, CountingLoader  a ready loader: its own state, or the number of batches
          torch DataLoader -> ExplainingCollator (data_errors) -> collation -> dataset

With one process the innermost loader stands alone. `builders` chooses it; `ranks.parallel_loading` adds the outer two.
"""
