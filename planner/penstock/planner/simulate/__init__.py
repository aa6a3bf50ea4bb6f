"""The simulator: one of the three interpreters of a Program, with a clock and a cost model in whole nanoseconds.

`costs` has the durations, `channels` the connections between ranks, `kernel` the event loop. `memory` walks the same
orders for their bytes. `simulation` is the entry point, `bound` a lower bound for all orders, and `periodic` skips the
repeating middle of long runs.
"""
