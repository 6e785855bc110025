// A folder in memory for the targets that read one.
#ifndef FUZZ_FOLDER_H
#define FUZZ_FOLDER_H

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char fuzz_path[] = "/dev/shm/fuzz.XXXXXX";

static void fuzz_remove(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", fuzz_path);
    if (system(command) != 0) fprintf(stderr, "%s could not be removed\n", fuzz_path);
}

// The folder of this process, which `make` fills at the first call, unless it is NULL; removed at exit.
static const char *fuzz_folder(void (*make)(const char *folder)) {
    static int made;
    if (made++) return fuzz_path;
    if (!mkdtemp(fuzz_path)) abort();
    atexit(fuzz_remove);
    if (make) make(fuzz_path);
    return fuzz_path;
}

// Replaces the contents of this file in the folder.
static void fuzz_file(const char *name, const uint8_t *bytes, size_t size) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", fuzz_path, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, bytes, size) != (ssize_t)size) abort();
    close(fd);
}

#endif
