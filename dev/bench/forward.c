// forward DIR fp32|bf16 T ROUNDS: times the trainer's forward pass and loss for one sequence of T tokens, in the memory
// that training uses, with every activation kept. Prints the seconds of each round, a line each. dev/bench/inference.py
// runs it.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "train_gpt2.c"

#include "runtime/start.h"
#pragma GCC diagnostic pop

static Model model;

int main(int argc, char **argv) {
    Error error;
    if (argc != 5) fail(EXIT_USAGE, "usage: forward DIR fp32|bf16 T ROUNDS");
    bool bf16 = !strcmp(argv[2], "bf16");
    size_t T = strtoul(argv[3], NULL, 10), rounds = strtoul(argv[4], NULL, 10);
    start_threads(0);
    if (!model_config_read(&model.config, argv[1], NULL, &error)) fail_with(&error);
    model.list = tensors_of(&model.config, NULL, 0);
    gemm_start(&model.mm, bf16);
    plan_parameters(&model, false, bf16);
    plan_activations(&model, model.config.layers, 1, T);
    memory_take(&model.plan);
    Weights weights = weights_of(&model);
    if (!weights_load(&weights, argv[1], &model.config.attn, &error)) fail_with(&error);
    model_ready(&model);
    round_parameters(&model);
    int32_t *tokens = malloc((T + 1) * sizeof *tokens);
    if (!tokens) fail(EXIT_RESOURCE, "out of memory for %zu tokens.", T);
    for (size_t t = 0; t <= T; t++) tokens[t] = (int32_t)(t * 7919 % model.config.vocab);
    for (size_t i = 0; i < rounds; i++) {
        double start = now();
        model_forward(&model, tokens, 1, T);
        model_loss(&model, tokens + 1, NULL, T, 0, false);
        printf("%.4f\n", now() - start);
    }
    return EXIT_DONE;
}
