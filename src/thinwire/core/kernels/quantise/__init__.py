"""One quantiser: levels of few bits and their scales, made by two rules, packed in one way, summed by one decoder.

An element of a block with scale u becomes a code of 1 to 8 bits, which stands for a value v times u. Ranks add v u.

| name | values v | scale u | block | rounding | sum on the wire | source |
|---|---|---|---|---|---|---|
| ``QSGD``, 2, 4, 8 bits | -s .. s, s = 1, 7, 127 | max or l2 / s | 512 elements | at random | all-gather | 1610.02132 |
| ``TernGrad`` | -1, 0, 1 | max of all ranks, clipped | a tensor | at random | all-reduce of int8 | 1705.07878 |
| ``Cast("int8")``, ``"int4"`` | -s .. s, s = 127, 7 | max / s | 256 elements | nearest | summed and encoded again | - |
| ``Cast("int2")`` | the means of 4 bins | root mean square | 256 elements | by bin | summed and encoded again | - |
| ``Cast("int1")`` | the means of 2 bins | mean magnitude | 256 elements | by bin | all-gather | - |
| ``SignSGD`` | -1, 1 | mean magnitude | a tensor | by sign | all-gather | 1901.09847 |
| ``OneBit`` | the means of 2 bins | 1 | a tensor | by sign | all-gather | Seide 2014 |

Between two ranks, ``Cast`` gathers. ``linear.py`` encodes the first three rows, ``bins.py`` the others; ``codes.py``
packs, decodes and sums for all. Exchanges, residuals and options are the methods' (``core/methods``). The parameter
server's "int8" is that of ``Cast``; split fine-tuning packs in the same way, with scales of tokens in bf16.

On a CPU a piece of the tensor goes through all passes before the next one does: it stays in the cache. On a GPU each
function is one Triton kernel, or two, and an element is read and written once in each.
"""
