// Types of a figure and of a slider (mpi4dl_nb/widgets/figure_widget.py).

interface FigureValues {
  png: Bytes;
  alt: string;
  tip: string;
  paper: string; // what a dark theme darkens, as a clip path
}

interface RangeValues {
  value: number;
  min: number;
  max: number;
  label: string;
  tip: string;
}
