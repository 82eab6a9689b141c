"""Attention to the last keys of every row: candidates of one signature, `(q, k, v, window, scale, return_lse) -> (o, lse or None)`.

q [B,S,G,h,Dk], k [B,G,S_kv,Dk] and v [B,G,S_kv,Dv] are checked, none is empty, and S_kv <= S + window - 1: some row sees every key.
"""
