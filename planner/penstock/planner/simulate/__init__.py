"""The simulator: one of the three interpreters of a Program, with a clock and a cost model in whole nanoseconds.

`costs` has the durations, `channels` the connections between ranks, `link` the places of posts and waits, and `kernel`
the event loop. `arrays` makes the tables of the loop and reads its result, `reductions` has the ends of steps, and
`pairs` the time that pairs hide. `memory` walks the same orders for their bytes. `simulation` is the entry point,
`bound` a lower bound for all orders, and `periodic` skips the repeating middle of long runs.
"""
