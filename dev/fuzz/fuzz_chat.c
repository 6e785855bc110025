// A hostile tokenizer_config.json: its chat template is recognized, or rejected with a message that names the folder.
// The same bytes as an answer, of which later turns see a part.
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "text/chat.h"

static void check_answer(const char *template, const char *answer, size_t size) {
    size_t length = size;
    const char *kept = chat_kept(chat_template(template), answer, &length);
    if (kept < answer || length > size || kept + length > answer + size) abort();
}

static void check_text(const uint8_t *bytes, size_t size) {
    char *text = malloc(size + 1);
    if (size) memcpy(text, bytes, size);
    text[size] = 0;
    check_answer("llama3", text, size);
    check_answer("qwen3", text, size);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Error error = {0};
    const char *system;
    const char *folder = fuzz_folder(NULL);
    fuzz_file("tokenizer_config.json", bytes, size);
    const ChatTemplate *chat = chat_template_in(folder, &system, &error);
    if (!chat && ((error.code != EXIT_INPUT && error.code != EXIT_USAGE) || !strstr(error.text, folder))) abort();
    if (chat && chat != chat_template(chat->name)) abort();
    check_text(bytes, size);
    return 0;
}
