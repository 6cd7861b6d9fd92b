"""Attention without its weights in memory: softmax(score(q kᵀ)) v by kernels that only ever have a tile of them."""
