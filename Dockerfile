# DiffusionPipe with the versions that its tests use; torch comes with CUDA, as PyPI has it.
#
#     docker build -t diffusionpipe .
#     docker run --gpus all --ipc host -v "$PWD:/work" diffusionpipe train birds.toml --ranks 4
FROM python:3.11-slim-bookworm

COPY . /opt/diffusionpipe
WORKDIR /opt/diffusionpipe
RUN pip install --no-cache-dir --constraint constraints.txt ".[lora,clips,tensorboard,optimizers]"

# Nobody needs to be root: give --user "$(id -u)" to own the files of a run.
USER 1000
WORKDIR /work
ENV HOME=/work
ENTRYPOINT ["diffusionpipe"]
