"""Whole models in one file, under the names that their authors gave the tensors.

`origins` says which rows of a file make each tensor of diffusers; `layout` which tensors a file of a pipeline has;
`reading` reads a component of a file as if it had a file of its own.
"""
