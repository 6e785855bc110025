// A hostile tokenizer_config.json: its chat template is recognized, or rejected with a message that names the folder.
//
// Sources: runtime/error.c runtime/file.c runtime/json.c runtime/tokenizer.c runtime/tokenizer_json.c runtime/chat.c
// Sources: runtime/pretokenize.c runtime/nfc.c runtime/utf8.c
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "runtime/chat.h"

static void make_nothing(const char *folder) {
    (void)folder;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Error error = {0};
    char system[64];
    const char *folder = fuzz_folder(make_nothing);
    fuzz_file("tokenizer_config.json", bytes, size);
    const ChatTemplate *chat = chat_template_in(folder, system, sizeof system, &error);
    if (!chat && ((error.code != EXIT_INPUT && error.code != EXIT_USAGE) || !strstr(error.text, folder))) abort();
    if (chat && (chat != chat_template(chat->name) || !memchr(system, 0, sizeof system))) abort();
    return 0;
}
