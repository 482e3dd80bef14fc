"""An engine as one file that loads without anybody's code: `write.export`, `read.load_engine`."""
