"""The judge of racecheck's reports: what it takes for the dispatch of warps, and nothing else."""

import pytest
from racecheck import Hazard, hazards, instructions, is_dispatch
from registry import Launch, ordered

SASS = """
        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0120*/                   LDS.U8 R2, [R2+UR27+0x280ec] ;
        /*0130*/                   ISETP.GT.U32.AND P0, PT, R2, 0x4, PT ;
        /*0140*/                   LDS.U8 R3, [R2+0x280ec] ;
        /*0150*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0160*/                   ULEA UR6, UR4, UR6, 0x18 ;
        /*0170*/                   SHF.R.U32.HI R2, RZ, 0x5, R2 ;
        /*0180*/                   VIADD R2, R2, UR6 ;
        /*0190*/                   LDS.U8 R2, [R2+0x280ec] ;
        /*01a0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
.L_x_1:
        /*01b0*/                   VIADD R2, R2, UR6 ;
        /*01c0*/                   LDS.U8 R2, [R2+0x280ec] ;
        /*01d0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*01e0*/               @P0 VIADD R2, R2, UR6 ;
        /*01f0*/                   LDS.U8 R2, [R2+0x280ec] ;
        /*0200*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0210*/                   IMAD.U32 R2, RZ, RZ, UR5 ;
        /*0220*/                   LDS.U8 R2, [R2+UR24+0x280ec] ;
        /*0230*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0240*/                   IMAD.U32 R2, R2, R3, UR5 ;
        /*0250*/                   LDS.U8 R2, [R2+UR24+0x280ec] ;
        /*3390*/                   MEMBAR.ALL.CTA ;
        /*33b0*/                   STS.64 [UR8+0x280f0], R2 ;
        /*33c0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*33d0*/                   STS.64 [UR8+0x280f0], R4 ;
        /*33e0*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;
        /*33f0*/                   STS.64 [UR8+0x280f0], R6 ;
        /*3400*/                   BAR.SYNC.DEFER_BLOCKING 0x2 ;
        /*3410*/                   STS.64 [UR8+0x280f0], R6 ;
        /*3420*/                   STS [UR8+0x280f8], R6 ;
        /*3430*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*3440*/                   STS.64 [UR8+0x280f0], R6 ;
        /*3450*/                   LDS.U8 R2, [R2+0x280ec] ;
        /*3460*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*3470*/                   STS.64 [UR8+0x280f0], R6 ;
"""
DISPATCH = Hazard("RAW", 0x284F5, "wide_kernel", 0x33B0, 0x120)
REPORT = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x284f5 in block (1,0,0) :
=========     Write Thread (63,0,0) at wide_kernel+0x33b0 in wide.py:189
=========     Read Thread (288,0,0) at wide_kernel+0x120 in wide.py:189
=========     Current Value : 2
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x20f5] in __triton_launcher.so
=========
212 cases of 36 ops, 683 left, 0 wrong
"""
SUMMARY = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)\n"


def test_a_byte_that_is_stored_before_the_barrier_of_the_block_and_read_behind_it_is_dispatch():
    assert all(
        is_dispatch(DISPATCH._replace(at=at), instructions(SASS)) for at in range(0x284F0, 0x284F8)
    )
    code = instructions(SASS)
    assert is_dispatch(DISPATCH._replace(read=0x190), code)  # behind its address
    assert is_dispatch(DISPATCH._replace(read=0x220), code)  # a move is a part of that
    assert is_dispatch(DISPATCH._replace(write=0x3410), code)  # one of two stores
    assert is_dispatch(DISPATCH._replace(write=0x3420, at=0x284F8), code)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "WAR"},
        {"at": 0x284EF},
        {"at": 0x284F8},
        {"at": 0x280F5},
        {"write": 0x33D0},  # its barrier counts threads
        {"write": 0x33F0},  # another barrier
        {"write": 0x3470},  # none behind it
        {"write": 0x3440},  # a load between them
        {"write": 0x3420},  # of other bytes
        {"read": 0x250},  # not the arithmetic of an address
        {"write": 0x3390},  # no store
        {"write": 0x33B4},  # no instruction
        {"read": 0x140},  # no barrier before it
        {"read": 0x130},  # no load
        {"read": 0x1C0},  # somebody may jump to where its address is made
        {"read": 0x1F0},  # not only arithmetic that always runs
        {"read": 0x110},
    ],
    ids=str,
)
def test_any_other_pair_is_a_hazard(change):
    assert not is_dispatch(DISPATCH._replace(**change), instructions(SASS))


def test_a_report_is_read_whole():
    assert hazards(REPORT + SUMMARY.format(1, 1)) == [DISPATCH]
    assert hazards("========= COMPUTE-SANITIZER\n" + SUMMARY.format(0, 0)) == []


@pytest.mark.parametrize(
    "report",
    [
        REPORT,  # the tool was killed
        REPORT + SUMMARY.format(2, 2),  # one more than can be read
        REPORT.replace("RAW hazard", "hazard") + SUMMARY.format(1, 1),
        REPORT.replace("Read Thread (288,0,0) at wide_kernel", "Read Thread (288,0,0) at other")
        + SUMMARY.format(1, 1),
    ],
)
def test_a_report_that_cannot_be_judged_is_refused(report):
    with pytest.raises(ValueError, match=r"summaries|could be read"):
        hazards(report)


def test_every_kernel_is_launched_before_time_ends():
    """The least launch that has a kernel which none before has, then all others, least first."""
    sized = [
        (30, {"wide"}, "wide, long"),
        (9, {"rows"}, "rows, more"),
        (4, {"rows"}, "rows"),
        (20, {"wide", "tiles"}, "wide"),
        (25, {"tiles", "flash"}, "flash"),
    ]
    launches = [(size, kernels, Launch(name, print)) for size, kernels, name in sized]
    names = [launch.name for launch in ordered(launches)]
    assert names == ["rows", "wide", "flash", "rows, more", "wide, long"]
    assert ordered([]) == []
