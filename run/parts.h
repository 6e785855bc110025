// What the files of this folder share among themselves; programs include run.h.
#ifndef RUN_PARTS_H
#define RUN_PARTS_H

#include "run/run.h"

// settle.c: checks what flags, run folder and data say, and fills in the run. Writes nothing.
void settle(Run *run);

// switches.c: --attn-switch and the changes that a resumed run has to repeat, into run->switches.
void settle_switches(Run *run);

// Cuts a lineage at the run's step: changes of normalizer beyond it are to be repeated. `made` as in lineage_cut().
void repeat_switches(Run *run, cJSON *lineage, const char *made);

// save.c: opens metrics.jsonl, without the lines that will be written again, and writes run.json.
void open_run_folder(Run *run);

// run.json. Ends the program if it cannot be written.
void write_run(Run *run);

// On rank 0: brings back what was removed of the run folder while the run was using it, so that its checkpoints can be
// resumed. False while the folder cannot be reached. Ends the program if another run has taken the folder.
bool restore_run_folder(Run *run, Error *error);

#endif
