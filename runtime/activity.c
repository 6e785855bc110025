#include "runtime/activity.h"

#include <stdatomic.h>

// Global, because it is what one thread of the process does, whichever function it is in.
static struct {
    const char *_Atomic what, *_Atomic waits;
    atomic_uint_fast64_t count;
} activity = {.what = "starting"};

void activity_progress(void) {
    activity.count++;
}

void activity_does(const char *what) {
    activity.what = what;
    activity_progress();
}

void activity_waits(const char *in) {
    if (activity.waits == in) return;
    activity.waits = in;
    activity_progress();
}

Activity activity_now(void) {
    return (Activity){activity.what, activity.waits, activity.count};
}
