"""The chunked backend: plain torch, any device, O(N D) memory, hand-derived backward.

A sequence is cut into chunks of C = 64 tokens. Within a chunk the C x C weights are written out
(`decay.py`); from chunk to chunk only the Dk x Dv state travels (`scan.py`). Chunks are worked on a
segment at a time (`layout.py`), so that the work space stays in cache and does not grow with N.
Saved for backward are the inputs and at most one state a segment; the rest is computed again.

    additive.py             S <- decay S + k v^T, plain and affine
    additive_noncausal.py   the same where every token sees all
    delta.py                the delta rule
    step.py                 one token: the recurrence itself, no chunks
"""
