#include "page_rows.cuh"

// What a test calls; see page_rows.cuh.
extern "C" int64_t antiphon_page_rows(const antiphon::Part* parts, int count, int64_t* rows, antiphon::BadRun* bad) {
  return antiphon::page_rows(parts, count, rows, bad);
}
