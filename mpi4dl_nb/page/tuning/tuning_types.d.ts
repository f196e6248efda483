// Types of the chart of plans and of their table (mpi4dl_nb/widgets/tuner.py, mpi4dl_nb/draw/tuning_points.py).

interface ChoiceValues {
  html: string;
  chosen: string;
  summary: string;
}

/** A plan: seconds for an image and bytes of the fullest rank. `number` is its place in the table, 0 if it is too large. */
interface TuningPoint {
  number: number;
  plan: string;
  name: string;
  kind: string;
  image_s: number;
  bytes: number;
  measured_image_s: number | null;
  measured_bytes: number | null;
  failure: string;
  on_front: boolean;
  facts: [string, string][];
  cost: Pair;
}

interface KindLook {
  name: string;
  colour: string;
  shape: string;
  marker: string; // the shape as Matplotlib names it
}

interface TuningWords {
  points: TuningPoint[];
  kinds: Record<string, KindLook>;
  rank_bytes: number | null;
}

interface TuningValues extends PageValues {
  words: TuningWords | { points?: undefined };
  chosen: string;
  busy: boolean;
}

/** The part of an axis that is shown, by factors or by differences. */
interface Axis {
  low: number;
  high: number;
  byFactors: boolean;
}

/** Where a point lies in px: as predicted and, if it was measured, as measured. */
interface PointPlace {
  predicted: Pair;
  measured: Pair | null;
}

interface TuningLayout {
  inner: Rectangle;
  across: Axis;
  down: Axis;
  places: PointPlace[];
  place: (seconds: number, bytes: number) => Pair;
}
