"""The library: the names of `import diffusionpipe as dp`.

Each name of `diffusionpipe` is defined in a module here, which is loaded when the name is first used. `schedules`,
`simulation`, `timelines` and `planning` never import torch; `layers`, `models`, `profiles` and `running` do.
"""
