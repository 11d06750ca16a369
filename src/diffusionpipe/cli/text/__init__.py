"""The words, tables and colours of the command line: values in, text out."""
