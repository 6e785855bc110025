// Unicode's normal form C: canonical decomposition, canonical order, canonical composition (Unicode Standard Annex 15).
// Equals the NFC normalizer of `tokenizers`, including its version of Unicode (text/nfc_tables.h).
#ifndef TEXT_NFC_H
#define TEXT_NFC_H

#include <stddef.h>
#include <stdint.h>

// Normalizes `length` bytes of valid UTF-8. `out` has room for 3 * length bytes, the most that NFC can take. Returns
// the number of bytes. Out of memory ends the program.
size_t nfc(const uint8_t *text, size_t length, uint8_t *out);

#endif
