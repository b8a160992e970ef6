"""Choice of formats and scales: calibration on a text, least squared error, tuning, and quantized KV caches.

`conversion` chooses among these methods. The module `quantize`, outside this folder, packs the weights of a model.
"""
