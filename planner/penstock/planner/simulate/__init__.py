"""The simulator: one of the three interpreters of a Program, with a clock and a cost model in whole nanoseconds.

`costs` says what time things take, `channels` who sends what to whom, `kernel` is the event loop, `memory` walks the
same orders for their bytes, `simulation` is the front door, `bound` what no order can beat, and `periodic` spares the
middle of long runs.
"""
