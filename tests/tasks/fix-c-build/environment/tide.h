#ifndef TIDE_H
#define TIDE_H

struct reading {
    int hour, minute;
    int height_cm;
};

/* Each takes count >= 1 readings in order of time. */
size_t highest(const struct reading *readings, size_t count);
size_t lowest(const struct reading *readings, size_t count);
size_t longest_rise(const struct reading *readings, size_t count);

#endif
