// Jinja templates, as far as two of them can be compared.
#ifndef RUNTIME_JINJA_H
#define RUNTIME_JINJA_H

// Rewrites a chat template so that two with the same result have the same text, if they differ only in the spelling of
// strings, in white space that is not rendered, in comments, or in what is written for tools, which nobody passes here.
// A string has \1 before and after its decoded bytes. Returns new memory, or NULL if the template cannot be read or
// memory is short. White space is that of transformers, which sets trim_blocks and lstrip_blocks.
char *jinja_canonical(const char *text);

#endif
