// What the main thread does, for the watch that --progress-timeout sets (runtime/heartbeat.h).
#ifndef RUNTIME_ACTIVITY_H
#define RUNTIME_ACTIVITY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// `what` follows a rank's name in a message: "reading data". Each of these calls is progress; files and collectives call
// them themselves.
void activity_does(const char *what);
void activity_progress(void);

// From now on the main thread waits for other ranks, in a call of this name; NULL: no longer.
void activity_waits(const char *in);

// Safe to call from another thread. The texts are literals.
typedef struct {
    const char *what, *waits;
    uint64_t count;    // of all progress so far
} Activity;
Activity activity_now(void);

#ifdef __cplusplus
}
#endif
#endif
