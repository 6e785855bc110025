#include "run/parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "math/gemm.h"
#include "model/model.h"
#include "runtime/error.h"
#include "runtime/process.h"
#include "runtime/spelling.h"
#include "runtime/version.h"

// Each rank may have its own path to the same data or model, and only rank 0 uses those of --out and --matmuls. But all
// ranks have such a flag, or none.
static bool is_own_path(const char *flag) {
    return word_place("train-data|val-data|init-from|out|matmuls", '|', flag) >= 0;
}

// Flags that change nothing in the results.
static bool is_own_choice(const char *flag) {
    return word_place("threads|rank-timeout|progress-timeout", '|', flag) >= 0;
}

static void add_flags(cJSON *facts, const TrainOptions *o) {
    char name[64], value[1024];
    for (const Option *row = o->table; row < o->table + o->count; row++) {
        if (row->only_in || is_own_choice(row->name)) continue;
        snprintf(name, sizeof name, "--%s", row->name);
        const char *text = options_text(row, value, sizeof value);
        if (is_own_path(row->name)) text = *(const char *const *)row->value ? "given" : "not given";
        cJSON_AddStringToObject(facts, name, text);
    }
}

// Adds each key of the model's config.json.
static void add_model(cJSON *facts, const ModelConfig *config) {
    char name[64], *text = model_config_json(config, false);
    cJSON *json = cJSON_Parse(text);
    const cJSON *item;
    cJSON_ArrayForEach(item, json) {
        char *value = cJSON_PrintUnformatted(item);
        snprintf(name, sizeof name, "the model's %s", item->string);
        cJSON_AddStringToObject(facts, name, value);
        free(value);
    }
    cJSON_Delete(json);
    free(text);
}

// ---- before the start

// What all ranks must agree on, as a flat object of texts.
static cJSON *common_facts(const Run *run) {
    cJSON *facts = cJSON_CreateObject();
    cJSON_AddStringToObject(facts, "the program", program_name);
    cJSON_AddStringToObject(facts, "the build", version_build());
    add_flags(facts, &run->o);
    add_model(facts, run->config);
    cJSON_AddStringToObject(facts, "the normalizer before the start", run->loaded.text[0] ? run->loaded.text : "none");
    cJSON_AddStringToObject(facts, "the training data", run->train_print);
    cJSON_AddStringToObject(facts, "the validation data", run->val_print ? run->val_print : "none");
    return facts;
}

static const char *fact_of(const cJSON *facts, const char *name) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(facts, name));
    return text ? text : "missing";
}

// Compares the facts named in `names`. The message quotes only the start of a long text, such as that of many shards.
static bool same_facts(const cJSON *names, const cJSON *mine, const cJSON *first, Error *error) {
    const cJSON *fact;
    cJSON_ArrayForEach(fact, names) {
        const char *here = fact_of(mine, fact->string), *there = fact_of(first, fact->string);
        if (strcmp(here, there) != 0)
            return error_set(error, EXIT_USAGE,
                             "rank %d: %s is %.800s, but on rank 0 it is %.800s.\n"
                             "  All ranks need the same program, flags, --config files, model and data.",
                             process.rank, fact->string, here, there);
    }
    return true;
}

// Different processors may share a build, but oneDNN has code of its own for each.
static void check_same_matmuls(void) {
    const GemmLibrary mine = gemm_library();
    GemmLibrary first = mine;
    process_broadcast(&first, sizeof first);
    int64_t other = process_max_int(memcmp(&mine, &first, sizeof mine) != 0 ? process.rank : 0);
    if (other)
        warn("the matmuls of rank %lld use other instructions than those of rank 0: its processor, its oneDNN or\n"
             "  ONEDNN_MAX_CPU_ISA differs. The run is valid, but its last bits depend on where each rank runs.",
             (long long)other);
}

void check_same_on_all_ranks(const Run *run) {
    Error error;
    if (process.size == 1) return;
    cJSON *mine = common_facts(run);
    char *text = cJSON_PrintUnformatted(mine);
    size_t size = text ? strlen(text) + 1 : 0;
    process_broadcast(&size, sizeof size);
    char *theirs = process.rank == 0 ? text : malloc(size + 1);
    if (!text || !theirs) fail(EXIT_RESOURCE, "out of memory for the flags.");
    process_broadcast(theirs, size);
    cJSON *first = cJSON_Parse(theirs);
    process_agree(same_facts(mine, mine, first, &error) && same_facts(first, mine, first, &error), &error);
    if (theirs != text) free(theirs);
    free(text);
    cJSON_Delete(mine);
    cJSON_Delete(first);
    if (!run->program->gpus) check_same_matmuls();
}

void check_same_start(const Run *run) {
    const TrainOptions *o = &run->o;
    int64_t resumes = process_max_int(o->resume), resumed = process_max_int(run->resumed);
    if (resumes != o->resume)
        fail(EXIT_USAGE, "rank %d has no --resume, but another rank has it. All ranks need the same flags.",
             process.rank);
    if (resumed != run->resumed)
        fail(EXIT_PEER, "rank %d finds no run in %s, but another rank does. All machines need the same --out folder.",
             process.rank, o->out);
    int64_t newest = process_max_int(run->step), oldest = -process_max_int(-run->step);
    if (newest != oldest)
        fail(EXIT_PEER,
             "--resume: some ranks find step %lld in %s, others step %lld. All machines need the same --out folder.\n"
             "  If they share it, a cache may be out of date: try again in a minute.",
             (long long)newest, o->out, (long long)oldest);
}

// ---- before a save

enum { NAMED = 8 };    // the most ranks that a message names

typedef struct {
    uint64_t hash;
    char host[56];
} Holding;

// The rank whose hash most ranks have; the lowest of several.
static int most_common(const Holding *all) {
    int best = 0, best_count = 0;
    for (int r = 0; r < process.size; r++) {
        int count = 0;
        for (int other = 0; other < process.size; other++) count += all[other].hash == all[r].hash;
        if (count <= best_count) continue;
        best = r;
        best_count = count;
    }
    return best;
}

void run_compare(const Run *run, uint64_t hash) {
    if (process.size == 1) return;
    Holding *all = allocate((size_t)process.size, sizeof *all, "the hashes of all ranks");
    all[process.rank].hash = hash;
    gethostname(all[process.rank].host, sizeof all->host - 1);
    process_gather(all, sizeof *all);
    const int most = most_common(all);
    const Holding common = all[most];
    char who[1024] = "";
    int count = 0;
    for (int r = 0, length = 0; r < process.size; r++) {
        if (all[r].hash == common.hash || ++count > NAMED) continue;
        length += snprintf(who + length, sizeof who - (size_t)length, "%srank %d on %s", count > 1 ? ", " : "", r,
                           all[r].host);
    }
    free(all);
    if (!count) return;
    fail(EXIT_PEER,
         "step %lld: %s%s: other parameters than on rank %d on %s, although ranks must have the same ones.\n"
         "  A GPU, memory or a network has computed or moved something wrong. Nothing of this step is saved; earlier\n"
         "  checkpoints are intact. Check the machine (nvidia-smi -q -d ECC), then resume with --resume.",
         (long long)run->step, who, count > NAMED ? " and more" : "", most, common.host);
}
