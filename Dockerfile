# attn.c with its trainer for GPUs, on Debian. doc/many_gpus.md says how to run it.
#
#   docker build -t attn.c .
FROM debian:bookworm
COPY . /attn.c
WORKDIR /attn.c
# for the processors of other machines, too
ENV MARCH=x86-64-v3
RUN scripts/setup.sh
RUN scripts/setup_cuda.sh
RUN make
RUN make train_gpt2cu
