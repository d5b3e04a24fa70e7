#include "tide.h"

/* The place of the first reading of the greatest height. */
size_t highest(const struct reading *readings, size_t count)
{
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (readings[i].height_cm >= readings[best].height_cm)
            best = i;
    return best;
}

/* The place of the first reading of the least height. */
size_t lowest(const struct reading *readings, int count)
{
    size_t best = 0;
    int least = 0;
    for (size_t i = 0; i < count; i++)
        if (readings[i].height_cm < least) {
            least = readings[i].height_cm;
            best = i;
        }
    return best;
}

/* How many readings the longest strictly rising run has. */
size_t longest_rise(const struct reading *readings, size_t count)
{
    size_t longest = 1, run = 1;
    for (size_t i = 1; i < count; i++) {
        if (readings[i].height_cm > readings[i - 1].height_cm) {
            run++;
        } else {
            if (run > longest)
                longest = run;
            run = 1;
        }
    }
    return longest;
}
