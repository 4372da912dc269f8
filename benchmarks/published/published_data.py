# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Data of published analyses, typed in."""

import numpy as np

# major earthquakes of the world by year, 1900 to 2006 (Zucchini, MacDonald, Langrock 2016)
EARTHQUAKES = np.array(
    """13 14 8 10 16 26 32 27 18 32 36 24 22 23 22 18 25 21 21 14 8 11 14 23 18 17 19 20
    22 19 13 26 13 14 22 24 21 22 26 21 23 24 27 41 31 27 35 26 28 36 39 21 17 22 17 19
    15 34 10 15 22 18 15 20 15 22 19 16 30 27 29 23 20 16 21 21 25 16 18 15 18 14 10 15
    8 15 6 11 8 7 18 16 13 12 13 20 15 16 12 18 15 16 13 15 16 11 11""".split(),
    int,
)

# respondents by four binary items, from + + + + to - - - - (Stouffer, Toby 1951)
STOUFFER_TOBY = np.array([42, 23, 6, 25, 6, 24, 7, 38, 1, 4, 1, 6, 2, 9, 2, 20])

# detections of salamanders at 39 sites in 5 visits (MacKenzie et al. 2006), by their
# sufficient statistics: 30 detections, at 18 of the sites
SALAMANDERS = np.zeros((39, 5), int)
SALAMANDERS[:12, :2] = 1
SALAMANDERS[12:18, 0] = 1

# dippers released in a year, by the year of the next recapture; last never (Lebreton et al. 1992)
DIPPERS = np.array(
    [
        [11, 2, 0, 0, 0, 0, 9],
        [0, 24, 1, 0, 0, 0, 35],
        [0, 0, 34, 2, 0, 0, 42],
        [0, 0, 0, 45, 1, 2, 32],
        [0, 0, 0, 0, 51, 0, 37],
        [0, 0, 0, 0, 0, 52, 46],
    ]
)

# premature ventricular contractions after a drug, of those before and after (Berry 1987)
HEARTS_AFTER = np.array([5, 2, 0, 0, 2, 1, 0, 0, 0, 0, 13, 0])
HEARTS_TOTAL = np.array([11, 11, 17, 22, 9, 6, 5, 14, 9, 7, 22, 51])

# women by disease, exposure and its imprecise measurement; exposure -1 is unknown (Carroll,
# Gail, Lubin 1993)
CERVIX = np.array(
    [
        [1, 0, 0, 13],
        [1, 0, 1, 3],
        [1, 1, 0, 5],
        [1, 1, 1, 18],
        [0, 0, 0, 33],
        [0, 0, 1, 11],
        [0, 1, 0, 16],
        [0, 1, 1, 16],
        [1, -1, 0, 318],
        [1, -1, 1, 375],
        [0, -1, 0, 701],
        [0, -1, 1, 535],
    ]
)

# peak sensitivity wavelengths of a monkey's eyes (Bowmaker et al. 1985)
EYES = np.array(
    """529.0 530.0 532.0 533.1 533.4 533.6 533.7 534.1 534.8 535.3 535.4 535.9 536.1 536.3
    536.4 536.6 537.0 537.4 537.5 538.3 538.5 538.6 539.4 539.6 540.4 540.8 542.0 542.8
    543.0 543.5 543.8 543.9 545.3 546.2 548.8 548.7 548.9 549.0 549.4 549.9 550.6 551.2
    551.4 551.5 551.6 552.8 552.9 553.2""".split(),
    float,
)

# log flow rate and log height of stagnant surface layers (Carlin, Gelfand, Smith 1992)
STAGNANT_X = np.array(
    """-1.39 -1.39 -1.08 -1.08 -0.94 -0.80 -0.63 -0.63 -0.25 -0.25 -0.12 -0.12 0.01 0.11 0.11
    0.11 0.25 0.25 0.34 0.34 0.44 0.59 0.70 0.70 0.85 0.85 0.99 0.99 1.19""".split(),
    float,
)
STAGNANT_Y = np.array(
    """1.12 1.12 0.99 1.03 0.92 0.90 0.81 0.83 0.65 0.67 0.60 0.59 0.51 0.44 0.43 0.43 0.33
    0.30 0.25 0.24 0.13 -0.01 -0.13 -0.14 -0.30 -0.33 -0.46 -0.43 -0.65""".split(),
    float,
)

# disasters in British coal mines by year, 1851 to 1961; -1 is unknown (Jarrett 1979)
COAL = np.array(
    """4 5 4 0 1 4 3 4 0 6 3 3 4 0 2 6 3 3 5 4 5 3 1 4 4 1 5 5 3 4 2 5 2 2 3 4 2 1 3 -1 2 1
    1 1 1 3 0 0 1 0 1 1 0 0 3 1 0 3 2 2 0 1 1 1 0 1 0 1 0 0 0 2 1 0 0 0 1 1 0 2 3 3 1 -1
    2 1 1 1 1 2 4 2 0 0 1 4 0 0 0 1 0 0 0 0 0 1 0 0 1 0 1""".split(),
    int,
)

# sessions by the numbers of their two or three biopsies in four grades of rejection
# (Spiegelhalter, Stovin 1983): grades, and the number of sessions
_SESSIONS = """2000 12 1100 10 0200 4 1010 9 0020 12 1001 1 0011 3 0002 6 3000 28 2100 13
    1200 10 0300 1 2010 9 1110 1 0210 1 1020 17 0120 1 0030 8 2001 1 1011 1 0021 1
    0012 3 0003 5""".split()
BIOPSIES = np.repeat(
    np.array([[int(n) for n in grades] for grades in _SESSIONS[::2]]),
    [int(n) for n in _SESSIONS[1::2]],
    axis=0,
)

# fitness of 45 patients for a general anaesthetic, in four grades, by an observer who saw
# each three times and by four others (Dawid, Skene 1979, table 1)
ANAESTHETIST = np.array([0, 0, 0, 1, 2, 3, 4])
FITNESS = np.array(
    [
        [int(grade) - 1 for grade in patient]
        for patient in """1111111 3334334 1122122 2223121 2223222 2223322 1222111 3333433
        2222223 2322223 4444444 2223343 1111111 2223212 1211111 1112111 1111111 1111111
        2222221 2221322 2222222 2222221 2223222 2212222 1111111 1111111 2322222 1111111
        1111111 1121121 1111111 3333233 1111111 2222222 2223232 4334343 2212232 2323233
        3333432 1111111 1111111 1212111 2322222 1211111 2222222""".split()
    ]
)
