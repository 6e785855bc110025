// What every task of eval_gpt2 needs, whatever computes the model: flags, sequence lengths, tables, and eval.json. The
// program owns the Eval and calls these functions; it contributes the losses, the logits and the attention weights.
//
//     eval_open(&e, argc, argv);                    // flags
//     for each model:
//         eval_find(&e, ...); set e.longest; eval_check(&e); load the weights;
//         eval_take_folder(&e); eval_start(&e); run the task's loop; eval_finish(&e); eval_record_model(&e);
//         eval_close_model(&e);
//     eval_write(&e);                               // eval.json and the picture
#ifndef EVAL_EVAL_H
#define EVAL_EVAL_H

#include <cjson/cJSON.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "data/shards.h"
#include "model/model.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/options.h"
#include "text/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

// --task's choices. X(KIND, name)
#define EVAL_TASKS(X) \
    X(TASK_LOSS, "loss") \
    X(TASK_POSITIONS, "positions") \
    X(TASK_NEEDLE, "needle") \
    X(TASK_ATTENTION, "attention") \
    X(TASK_SCORES, "scores") \
    X(TASK_CHOICE, "choice")
#define EVAL_TASK(kind, name) kind,
typedef enum { EVAL_TASKS(EVAL_TASK) TASK_COUNT } EvalTask;
extern const char *const eval_tasks[TASK_COUNT];
typedef enum { PN_AS_LEARNED, PN_LOG } PnExtrapolation;
typedef enum { EVAL_FP32, EVAL_BF16 } EvalType;
typedef enum { CHAT_RAW, CHAT_SQUAD, CHAT_CHATML } Chat;

enum {
    // Ranges of positions in the table of --task positions. Each, except the first, is as long as all ranges before it.
    EVAL_PARTS = 9,
    MAX_MODELS = 64
};

typedef struct {
    const char *model, *data, *attn, *rope_scaling, *ignore_config_key, *out, *prompt_file, *city, *number, *system;
    int64_t max_tokens, samples, max_new_tokens, digits, seed, threads;
    IntList seq_lens, depths;
    double rope_theta;
    int pn_extrapolate, task, chat, dtype, pack;
    bool doc_mask, random_depth, picture, save_prompts, foreign_folder;
} EvalOptions;

// One of --seq-lens. The losses are in nats per token that counts, under the checkpoint's normalizer [0] and the given
// one [1].
typedef struct {
    size_t T;
    Shards *shards;
    uint64_t windows;    // how many are evaluated
    double rope_theta, loss[2], part[EVAL_PARTS];
} Length;

// A line on a terminal's stderr: the tokens that are done, of all models and lengths of the call, and the time left.
typedef struct {
    double start, shown;
    uint64_t total, done, piece;    // tokens; the piece is what the model computes now
    bool visible;
} Bar;

typedef struct {
    EvalOptions o;
    cJSON *arguments;    // the flags that the task uses
    char *models[MAX_MODELS];
    size_t model_count, model_at;

    // The model that is being evaluated.
    char folder[PATH_MAX];
    char name[256];         // its label in tables and pictures
    ModelConfig *config;    // the program's, under the normalizer in use, and with the flags' theta and RoPE scaling
    AttentionList own, given;    // the checkpoint's normalizers, and those of --attn (the same without the flag)
    bool switches;               // do they differ?
    bool after;                  // is `given` in use, after the switch?
    bool checking;               // is the model only checked, before the first one is evaluated?
    Tokenizer *tokenizer;        // NULL if the folder has none that we support
    Length lengths[OPTION_LIST_MAX];
    size_t count, longest, first_part;    // number of lengths; the longest; the end of the first range of positions
    bool masked;                          // may some targets not count?
    Shards *data;                         // for the fingerprint; NULL if the task reads no shards
    char questions[128];                  // the fingerprint, as JSON, of a file of questions; "" for other tasks

    Bar bar;
    uint64_t work;                 // the tokens of the model's evaluation under one normalizer, for the bar
    uint64_t tokens;               // that the model has computed so far
    uint64_t parts, not_finite;    // see eval_count()
    char affected[64];             // the first numbers of parts that are not finite
    size_t last_affected;
    cJSON *results, *described, *lineage, *pn_fit;
    cJSON *files;     // the names of the files that eval_file() created
    File *prompts;    // --save-prompts
} Eval;

// ---- eval/eval.c

// Parses the flags. `config` is the program's, which eval_find() fills. e is zeroed before.
void eval_open(Eval *e, ModelConfig *config, int argc, char **argv);

// Finds the checkpoint of the current model and reads its config. Returns false if it is damaged, or deleted in the
// meantime.
bool eval_find(Eval *e, Error *error);

// Writes --seq-lens, where 0 means L. Returns how many there are.
size_t eval_lengths(const Eval *e, size_t *lengths);

// For a task that has a single length, which must be at least `least`.
size_t eval_length(const Eval *e, size_t least);

// Call it once the task has set e->longest, e->work and e->data: checks the flags against the longest sequence.
void eval_check(const Eval *e);

// Creates the folder --out, if there is one, and locks it until the program ends, because two evaluations would mix
// their files there. Ends the program if the folder cannot be written to, before anything is evaluated. Removes what a
// killed evaluation has left.
void eval_take_folder(const Eval *e);

// Prints what will be evaluated.
void eval_start(const Eval *e);

// Counts a part of the evaluation (a length, a needle, a prompt, a question) and whether its numbers are finite.
// number: its length, or the number of the prompt or question, from 1. eval_finish() names it.
void eval_count(Eval *e, bool finite, size_t number);

// After the evaluation under a normalizer: warns if some parts were not finite.
void eval_finish(Eval *e);

// The number of characters of a UTF-8 text, for aligning columns of names.
size_t eval_characters(const char *text);

// Rounded to a multiple of 1/unit, zero without a sign: printf() prints "-0.0000" for a small negative number.
static inline double rounded(double x, double unit) {
    return shown(round(x * unit) / unit + 0.0);
}

// The initial values of the learned scalars that --attn adds, recorded in the lineage: the program calls it when it
// switches, after the evaluation under the checkpoint's own normalizer.
void eval_switch(Eval *e);

// RoPE's angles for a text of T tokens, see model_rope(). Under ntk, theta follows from T, even if further positions
// have angles.
RopeAngles eval_angles(const Eval *e, double base, size_t T);

// Records the model in "models".
void eval_record_model(Eval *e);

// Goes to the next model.
void eval_close_model(Eval *e);

// Adds {"model", "attn"} to the results and returns the row.
cJSON *eval_row(Eval *e);

// Creates a file that belongs to eval.json: OUT/NAME.tmp, which eval_write() renames. An interrupted evaluation
// leaves the previous results untouched, and a folder never has an eval.json whose other files are unfinished.
File *eval_file(Eval *e, const char *name);
void eval_file_write(File *file, const void *data, size_t size);

// Writes eval.json, and draws the picture.
void eval_write(Eval *e);

// Before the first model is evaluated. p->total is that of the whole call.
void bar_start(Bar *p);

// Goes to the next piece of this many tokens. The bar is shown at once, and then at most five times a second.
void bar_next(Bar *p, uint64_t tokens);

// part of `parts` of the piece are done.
void bar_within(Bar *p, size_t part, size_t parts);

// Before anything is printed, and after the last piece.
void bar_clear(Bar *p);
void bar_end(Bar *p);

// ---- eval/losses.c

// Opens the data at each length.
void losses_settle(Eval *e);

// Prints the head of the table.
void losses_begin(Eval *e);

// Prints and records one length. sums, counts (T): the summed losses at each position and the number of targets there
// that count. all_zero: the share of attention's rows that are all-zero.
void losses_add(Eval *e, size_t i, const double *sums, const uint64_t *counts, double all_zero);

// After the last length.
void losses_end(Eval *e);

// After the last model: a table with a row for each model and normalizer and a column for each length, if there is more
// than one row.
void losses_compare(const Eval *e);

// Fits p_n = a1 ln n + a2 to p (L) by least squares and writes the fit for n = 1..count ([SSMax] Figure 2).
void fit_pn(Eval *e, const float *p, float *fit, size_t count);

#ifdef __cplusplus
}
#endif
#endif
