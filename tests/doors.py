"""The front doors of the library, behind one interface for the tests."""

import accumgrad


class BuilderDoor:
    """`build_accumulation_ops`, and cycles by `run_cycle`."""

    def __init__(self, loss, optimizer, num_micro_batches, **options):
        self.num_micro_batches = num_micro_batches
        self.ops = accumgrad.build_accumulation_ops(loss, optimizer,
                                                    **options)

    def accumulate(self, session, feeds):
        """Begins a cycle with fewer micro-batches than it has."""
        session.run(self.ops.zero_ops)
        for feed in feeds:
            session.run(self.ops.accum_ops, feed)

    def run_cycle(self, session, feeds):
        """Runs a whole cycle."""
        assert len(feeds) == self.num_micro_batches
        self.accumulate(session, feeds)
        session.run(self.ops.train_op)


DOORS = {"builder": BuilderDoor}
