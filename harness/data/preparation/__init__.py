"""Making a token data set: text files, parquet, Hub data sets or token files in; tokenized, shuffled and split
safetensors out, in a work folder that an interrupted preparation continues.
"""
